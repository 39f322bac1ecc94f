"""Commands for a terminal. Thin: what a module should hold is in models/, train/ or eval/."""
