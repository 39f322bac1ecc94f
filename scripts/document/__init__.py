"""The pages of docs/ that are made from the code: every option, and the public Python interface."""
