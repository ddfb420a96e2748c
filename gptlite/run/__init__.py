"""A run: built from its configuration, restored, kept in its folder, announced and summed up."""
