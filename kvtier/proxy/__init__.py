"""The proxy in front of prefillers and decoders: one address for clients, any number of engines behind it."""
