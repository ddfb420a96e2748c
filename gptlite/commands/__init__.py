"""Commands of `gptlite`, one module each. `main` reads the command line."""
