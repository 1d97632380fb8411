"""Help with heads in other people's engines: what may be wrong before they serve, and what a server really accepts."""
