"""Words for run names that are easy to say and remember: 0007-brisk-otter."""

# fmt: off
ADJECTIVES = (
    "able", "agile", "amber", "ample", "apt", "bold", "brave", "brief", "bright", "brisk", "calm", "candid",
    "clear", "clever", "crisp", "dapper", "deft", "eager", "early", "fair", "fleet", "fond", "frank", "fresh",
    "gentle", "glad", "grand", "hale", "handy", "hardy", "jolly", "keen", "kind", "late", "lively", "loyal",
    "lucid", "mellow", "merry", "mild", "modest", "neat", "nimble", "noble", "plain", "polite", "prime", "proud",
    "quick", "quiet", "rapid", "ready", "robust", "round", "sage", "serene", "sharp", "sly", "smart", "snug",
    "solid", "sound", "spry", "steady", "still", "stout", "sturdy", "sunny", "swift", "tidy", "trim", "true",
    "vivid", "warm", "wise", "witty",
)
ANIMALS = (
    "adder", "badger", "bear", "beaver", "bison", "bittern", "boar", "buzzard", "carp", "cod", "crane", "crow",
    "curlew", "deer", "dove", "eagle", "eel", "egret", "elk", "falcon", "ferret", "finch", "fox", "frog", "gannet",
    "goat", "goose", "grebe", "hare", "hawk", "hedgehog", "heron", "hobby", "horse", "ibex", "jay", "kestrel",
    "kite", "lark", "linnet", "lizard", "lynx", "magpie", "marten", "merlin", "mole", "moose", "moth", "mouse",
    "newt", "osprey", "otter", "owl", "perch", "pike", "plover", "pony", "puffin", "quail", "raven", "robin",
    "rook", "salmon", "seal", "shrew", "snipe", "sparrow", "stag", "stoat", "stork", "swan", "swift", "tern",
    "toad", "trout", "vole", "wren",
)
# fmt: on
