"""Many hosts: the controller, its client in each instance, and the proxy."""
