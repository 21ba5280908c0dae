"""From measurements to rows: the columns that several figures share, the CSV file, and the printed table."""
