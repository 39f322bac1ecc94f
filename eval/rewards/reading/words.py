"""Words of any script, for ROUGE: what `rouge_score` takes as its tokenizer.

Scripts with spaces give words: letters with their marks, and digits (Korean: what stands between spaces, particles
included). Chinese, Japanese, Thai, Lao, Khmer, Burmese and Tibetan have no spaces between words, and give characters,
as is customary for ROUGE on Chinese (LCSTS, arXiv 1506.05865): no segmenter for each language is needed. ASCII text
gives what rouge-score's own tokenizer does.
"""

import unicodedata

import regex
from nltk.stem import porter
from rouge_score.tokenizers import Tokenizer

SPACELESS = "".join(
    rf"\p{{Script={name}}}" for name in ("Han", "Hiragana", "Katakana", "Thai", "Lao", "Khmer", "Myanmar", "Tibetan")
)
# One character with its marks; or a run of letters, marks and digits of other scripts.
TOKEN = regex.compile(
    rf"(?V1)[[{SPACELESS}]&&[\p{{L}}\p{{N}}]][\p{{M}}ー]*|[[\p{{L}}\p{{N}}]--[{SPACELESS}]][[\p{{L}}\p{{M}}\p{{N}}]--[{SPACELESS}]]*"
)
LETTER = regex.compile(r"[\p{L}\p{N}]")
MIN_STEMMED = 4  # characters, as in rouge-score


class UnicodeTokenizer(Tokenizer):
    """Lower-case words, or characters. use_stemmer: English words of more than three letters by their stem."""

    def __init__(self, use_stemmer: bool = False) -> None:
        self._stemmer = porter.PorterStemmer() if use_stemmer else None

    def tokenize(self, text: str) -> list[str]:
        """The text's tokens, in order."""
        tokens = TOKEN.findall(unicodedata.normalize("NFKC", text).lower())
        if self._stemmer is None:
            return tokens
        return [
            self._stemmer.stem(token) if len(token) >= MIN_STEMMED and token.isascii() else token for token in tokens
        ]


def unseen_share(text: str) -> float:
    """Share of the text's letters and digits that rouge-score's own tokenizer drops: all but a-z and 0-9."""
    letters = LETTER.findall(text)
    return sum(not letter.isascii() for letter in letters) / len(letters) if letters else 0.0
