"""What a site runs: its checks, its sign-off, its SuperNode."""
