"""Starting a federation: certificates, processes on one machine."""
