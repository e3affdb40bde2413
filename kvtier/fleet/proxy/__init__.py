"""HTTP proxy for disaggregated serving: one address for clients, any number of prefill and decode engines."""
