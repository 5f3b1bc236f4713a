"""ScienceWorld."""
