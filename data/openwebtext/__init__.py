"""OpenWebText."""
