"""Jobs that fit predictors and policies, and the reports that compare them."""
