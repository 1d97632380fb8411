"""Reading heads in the formats of their makers."""
