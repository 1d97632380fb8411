"""One decoding loop behind OpenAI's HTTP interface. Its modules need the extra `serve`;
nothing but the verb itself imports them."""
