"""What a site runs: its checks, its presence, its SuperNode."""
