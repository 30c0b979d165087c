"""The verbs of a model over groups, engines and phases; memory demands; metrics export."""
