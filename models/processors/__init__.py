"""What changes the target's logits by the text so far: penalties, bans, grammars, processors of one's own."""
