"""Parts of tools/faults.py: choice of faults, private copies of the checkout, coverage of the tests, trials, table."""
