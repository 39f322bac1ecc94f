"""The text that is trained on: engines that answer prompts, and the files of their answers."""
