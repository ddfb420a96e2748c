"""Training speeds that others have published, beside what the planner says of the same runs.

cd tests && python -m plan.published                                      # each row: published, predicted, error
cd tests && python -m plan.published ../docs/planner_published.md         # the page anew, and its picture

`row.py` has a row, and `stacks.fitted_cluster(row)` returns its cluster with the factors of its stack. `mpt.mpt_row`
and `titan.titan` make more rows of their stacks.
"""
