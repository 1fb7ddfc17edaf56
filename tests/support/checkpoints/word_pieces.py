"""Makes a vocabulary for BERT's tokenizer that is small enough for a random captioner."""

_WORDS = """
[PAD] [unused0] [SEP] [CLS] [UNK] [MASK] a photo ##graphy of red circle is above two blue square ##s . ' s hat
do ##es n t fit , they ve said ; we re sure ! na ##ive cafe 日 本 and tab lines the dog 4 ##2 years old ? it 7 man
mask A ##é < > / ##n cat on sofa with small big green grass sky water tree ##r ##ed ##ing
"""


def word_piece_vocabulary() -> str:
    """The content of a ``vocab.txt``. [SEP] has id 2, as the end of ``random_captioners``."""
    return "\n".join(_WORDS.split()) + "\n"
