"""The commands of `gptlite` that have no room of their own, a module each; `main` reads the command line."""
