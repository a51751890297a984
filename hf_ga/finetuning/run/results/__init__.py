"""What a run leaves: checkpoints, models, figures, plots, predictions.

In: a run in progress. Out: files in its folder, lines on the screen. Begin with outputs.py;
saving.py saves and resumes, report.py prints and plots, hub.py uploads.
"""
