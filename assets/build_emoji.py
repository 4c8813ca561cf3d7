"""Draw the glyphs of the emoji questions, from Google's Noto emoji font (SIL Open Font License 1.1).

    apt-get install -y fonts-noto-color-emoji && python assets/build_emoji.py     # rewards/scorers/objects/emoji.png

One row per kind of thing, in the order of its `THINGS`: glyphs of 32 pixels with transparency.
"""

from __future__ import annotations

from PIL import Image, ImageDraw, ImageFont

from genrl_rewards.scorers.objects.emoji import SHEET, SIDE, THINGS

FONT = "/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf"
STRIKE = 109  # the only size at which the font has pictures: 136 x 128 pixels
GLYPHS = {
    "animals": "🐱🐶🐭🐷🐸🐵🐔🐧🐢🐙🐠🐘",
    "fruit": "🍎🍌🍇🍓🍊🍋🍉🍍🍒🍐🍑🥝",
    "foods": "🍞🧀🍕🍔🥚🍪🍩🍚🌽🥕🍄🍦",
    "vehicles": "🚗🚌🚲🚂🚀🚁🚜🚢🚕🚑🚒🛵",
    "clothes": "👕👖👗🧦🧤🎩👟👢👜🧣👑👓",
    "plants": "🌲🌹🌻🌵🌷🍁🍀🌴🌾🌺🌱🌼",
    "tools": "🔨🔧🔑✂🔒🔦🧲🧹📏🔍🪜🪣",
    "instruments": "🎸🎺🎻🥁🎹🎷🔔🎤🎧📻🪕🪗",
}


def glyph(font: ImageFont.FreeTypeFont, character: str) -> Image.Image:
    """One character, [SIDE, SIDE] with transparency, its longer side filling the square."""
    canvas = Image.new("RGBA", (160, 160))
    ImageDraw.Draw(canvas).text((8, 8), character, font=font, embedded_color=True)
    picture = canvas.crop(canvas.getbbox())
    square = Image.new("RGBA", (max(picture.size),) * 2)
    square.paste(picture, tuple((max(picture.size) - side) // 2 for side in picture.size))
    return square.resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def main() -> None:
    font = ImageFont.truetype(FONT, STRIKE)
    columns = max(map(len, THINGS.values()))
    sheet = Image.new("RGBA", (columns * SIDE, len(THINGS) * SIDE))
    for row, (kind, names) in enumerate(THINGS.items()):
        assert len(GLYPHS[kind]) == len(names), kind
        for column, character in enumerate(GLYPHS[kind]):
            sheet.paste(glyph(font, character), (column * SIDE, row * SIDE))
    sheet.quantize(256, method=Image.Quantize.FASTOCTREE).save(SHEET, optimize=True)


if __name__ == "__main__":
    main()
