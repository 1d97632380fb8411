"""What is written for each engine, and how it is started."""
