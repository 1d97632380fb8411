"""Plain HTTP to servers that are not trusted."""
