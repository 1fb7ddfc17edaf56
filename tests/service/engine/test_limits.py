"""What the caches hold of a request: checked before it costs anything."""

import pytest

from snapcap.service.engine.request import Limits
from snapcap.service.errors import InvalidOption, PromptTooLong

LIMITS = Limits(cache_length=20, default_new_tokens=6, eos_ids=frozenset({2}))


def test_limits_keep_prompt_caption_and_start_token_within_the_cache() -> None:
    LIMITS.check(0, 19)
    LIMITS.check(LIMITS.max_prompt_tokens, 1)
    with pytest.raises(InvalidOption, match="at most 19"):
        LIMITS.check(0, 20)
    with pytest.raises(InvalidOption, match="at most 1:"):
        LIMITS.check(LIMITS.max_prompt_tokens, 2)
    with pytest.raises(PromptTooLong, match="has 19 tokens; send at most 18"):
        LIMITS.check(LIMITS.max_prompt_tokens + 1, None)
    with pytest.raises(InvalidOption, match="at most 4, the rows"):
        Limits(20, 6, frozenset(), max_beams=4).check(0, None, 5)
    assert LIMITS.new_tokens(0, None) == 6
    assert LIMITS.new_tokens(16, None) == 3  # the default, as far as the cache reaches
    assert LIMITS.new_tokens(LIMITS.max_prompt_tokens, None) == 1
