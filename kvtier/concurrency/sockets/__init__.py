"""Connections to servers, for values of many megabytes: without copies, pooled, beside the event loop."""
