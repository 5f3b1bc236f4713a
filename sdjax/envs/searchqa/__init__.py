"""Search-QA."""
