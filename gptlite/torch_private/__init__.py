"""Private names of torch, a module for each topic. docs/torch_versions.md lists them; no other file uses any.

Training uses `dispatch`, `distributed`, `fsdp`, `modules`, `ops` and `saved`. The others are for satellites, so that
training does not import them.
"""
