"""Measurements. `./dev bench NAME` runs the module of that name, on a private PostgreSQL with fsync on."""
