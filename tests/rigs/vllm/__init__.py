"""Real vLLM engines in processes of their own, and the small models that they run."""
