"""What a coordinator sets up: certificates, the sites' keys, the SuperLink."""
