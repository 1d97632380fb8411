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
# a prompt as a file, in the longest UTF-8; flags of a verb as YAML take less than one kilobyte
PROMPT_BYTES, SETTINGS_BYTES = 4 * TEXT_CHARACTERS, 1 << 18

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
# of penalties, biases and temperatures: far above any logit, far below where float32 ends
LOGIT = 1e30
# Python objects are made of every entry of a GGUF file's lists; the longest are merges, about half a million
GGUF_ENTRIES, GGUF_FIELDS, GGUF_TENSORS, GGUF_DIMENSIONS = 1 << 21, 1 << 16, 1 << 16, 4

# -- what a user asks for

# the paper's tree has top-k 10, depth 8 and 60 nodes; a level proposes the square of top-k
DRAFT_TOP_K, DRAFT_DEPTH, DRAFT_NODES = 64, 128, 1024
# requests decoded at a time: each has keys and values of its own
SLOTS = 1 << 12
# how often a question is asked, or an answer sampled: all of it is kept until the statistics are made
REPEATS = 1 << 20
# counts that size nothing, so that no number anywhere outgrows 64 bits
COUNT = 1 << 40

# -- training

# the paper has 7 steps; each keeps the activations of all rows
TTT_STEPS = 64
# decoder layers of a head: the paper has 1
HEAD_LAYERS = 16
# of one of a head's parts: Hydra++ has 4
PART_LAYERS = 16
# of the state that ties drafts together: as wide as a large target's hidden states
TIE_SIZE = 1 << 14
# tokens packed into a micro-batch, and micro-batches of an optimizer step: a step of 2**31 tokens is none
BATCH_TOKENS, ACCUMULATE = 1 << 22, 1 << 16
# the order of all conversations in all epochs is planned in advance: some gigabytes at this size
PLANNED = 1 << 26
# learning rates in use lie below 0.1
RATE = 1000.0
