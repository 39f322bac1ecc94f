"""What runs beside the trainer, in processes of its own: a supervisor, and the model-written code that it shuts in.

The standard library alone is imported here: these modules run in an interpreter that is started for one answer.
"""
