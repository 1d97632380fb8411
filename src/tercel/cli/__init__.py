"""The command line: thin, on top of everything; nothing else imports it."""
