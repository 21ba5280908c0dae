"""Memory that peers share."""
