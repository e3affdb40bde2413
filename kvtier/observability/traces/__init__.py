"""OpenTelemetry spans of requests, tier I/O, KV transfers and the controller's operations."""
