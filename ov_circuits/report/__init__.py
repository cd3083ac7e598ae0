"""Pages and files out: tables, figures and the offline dashboard."""
