"""What any program needs: errors, configurations, safe files, random numbers, progress.

It knows neither speech nor federations: what names an utterance belongs into `data`, what names a
round or a client into `exchange`. Only `recipe_sections` does, options that several rooms read.
"""
