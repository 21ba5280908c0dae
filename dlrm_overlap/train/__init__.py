"""The run: put together, trained, evaluated, compared, exported."""
