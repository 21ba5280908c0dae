"""Memory that ranks share, and how they synchronize."""
