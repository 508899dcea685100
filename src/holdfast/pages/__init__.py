"""Pages in HTML, for the browser and for files to send.

`environment` the templates, which escape everything that they are given, and Markdown as HTML that stays inert
"""
