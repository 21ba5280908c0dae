"""What both ends of an exchange agree on: shards, windows, flags, epochs. No kernel is launched here."""
