"""A text that says things again and again: a nursery rhyme in which each verse holds the last."""

LINES = (
    "the house that Jack built",
    "the malt that lay in ",
    "the rat that ate ",
    "the cat that killed ",
    "the dog that worried ",
    "the cow with the crumpled horn that tossed ",
    "the maiden all forlorn that milked ",
    "the man all tattered and torn that kissed ",
    "the priest all shaven and shorn that married ",
    "the cock that crowed in the morn that waked ",
    "the farmer sowing his corn that kept ",
)


def rhyme() -> bytes:
    """The eleven verses, 2 kB."""
    verses = ("This is " + "".join(LINES[verse::-1]) + ".\n" for verse in range(len(LINES)))
    return "".join(verses).encode()
