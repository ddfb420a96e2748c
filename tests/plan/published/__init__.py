"""Training speeds that others have published, beside what the planner says of the same runs.

cd tests && python -m plan.published                                      # each row: published, predicted, error
cd tests && python -m plan.published ../docs/planner_published.md         # the page anew, and its picture
"""
