"""Private names of torch, a module for each topic. docs/torch_versions.md lists them; no other file uses any."""
