"""How large what comes from outside may be. Each is far above what is in use, and far below what would fill a machine;
where a file's own size bounds a number, the two are compared instead."""

from __future__ import annotations

# -- JSON and text

# tokenizers of the largest vocabularies take some 35 MB, indexes of the largest models a few
JSON_BYTES = 64 << 20
# configurations nest about six deep, tool schemas about ten; Python's own functions on values fail at a thousand
JSON_DEPTH = 64
# 2**128 has 39 digits; numbers beyond belong to no format that is read here
JSON_DIGITS = 40
# a conversation as one line: a megabyte of text is a thousand pages
LINE_BYTES = 16 << 20
# packed text grows five- to twentyfold, machine-made JSON up to a hundredfold; beyond the free part, more is refused
UNPACKED_FREE, UNPACKED_RATIO = 64 << 20, 200
# what is rendered and tokenised at once: some 500,000 tokens, of up to 400 bytes each while they are made
TEXT_CHARACTERS = 2_000_000
# by how much the rules of a tokenizer may lengthen a text: those in use write one letter as a few
TEXT_GROWTH = 1000
# every answer is rendered with all messages before it
TURNS = 1000

# -- chat templates

# a long conversation is rendered within milliseconds
RENDER_SECONDS = 4.0
# looked at every few milliseconds; a text that doubles can grow by three times as much in between
RENDER_BYTES = 128 << 20
# whole numbers written in a template are indices and widths
TEMPLATE_NUMBER = 1_000_000

# -- models

# the largest vocabularies have about a million tokens
VOCABULARY = 1 << 22
# of a head's other sizes: those of the largest models are some tens of thousands
HEAD_SIZE = 1 << 22
POSITIONS = 1 << 40
FEATURE_LAYERS = 64
# a model's weights against those in its files, both in numbers: ties and packed weights make them differ
WEIGHTS_RATIO, PACKED_RATIO = 2, 16
# what a model may ask for beyond that: masks and tables of positions, which are made and not stored
NUMBERS_FREE = 1 << 27
# a layer has at least one tensor of its own; fewer layers than this are made within a second in any case
LAYERS_FREE = 128
EXPERTS = 1 << 13
# Python objects are made of every entry of a GGUF file's lists; the longest are merges, about half a million
GGUF_ENTRIES, GGUF_FIELDS, GGUF_TENSORS, GGUF_DIMENSIONS = 1 << 21, 1 << 16, 1 << 16, 4
