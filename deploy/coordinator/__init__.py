"""What a coordinator sets up: certificates, keys of sites, the SuperLink."""
