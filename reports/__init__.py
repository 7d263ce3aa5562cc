"""A stored run, told: tables, charts, a page and the terminal's last words, all pure functions of the run folder.

To read: words, groups (cells become rows over repeats), columns, tables, sentence (what was found), context (where it
was found and what to beware of), svg, charts, html, terminal. Only here are numbers rounded.
"""
