"""The 150 classes of ADE20K's scene parsing benchmark and the colours they are shown in."""

_TABLE = """
wall 787878, building b47878, sky 06e6e6, floor 503232, tree 04c803, ceiling 787850, road 8c8c8c,
bed cc05ff, windowpane e6e6e6, grass 04fa07, cabinet e005ff, sidewalk ebff07, person 96053d,
earth 787846, door 08ff33, table ff0652, mountain 8fff8c, plant ccff04, curtain ff3307,
chair cc4603, car 0066c8, water 3de6fa, painting ff0633, sofa 0b66ff, shelf ff0747, house ff09e0,
sea 0907e6, mirror dcdcdc, rug ff095c, field 7009ff, armchair 08ffd6, seat 07ffe0, fence ffb806,
desk 0aff47, rock ff290a, wardrobe 07ffff, lamp e0ff08, bathtub 6608ff, railing ff3d06,
cushion ffc207, base ff7a08, box 00ff14, column ff0829, signboard ff0599, chest of drawers 0633ff,
counter eb0cff, sand a09614, sink 00a3ff, skyscraper 8c8c8c, fireplace fa0a0f, refrigerator 14ff00,
grandstand 1fff00, path ff1f00, stairs ffe000, runway 99ff00, case 0000ff, pool table ff4700,
pillow 00ebff, screen door 00adff, stairway 1f00ff, river 0bc8c8, bridge ff5200, bookcase 00fff5,
blind 003dff, coffee table 00ff70, toilet 00ff85, flower ff0000, book ffa300, hill ff6600,
bench c2ff00, countertop 008fff, stove 33ff00, palm 0052ff, kitchen island 00ff29, computer 00ffad,
swivel chair 0a00ff, boat adff00, bar 00ff99, arcade machine ff5c00, hovel ff00ff, bus ff00f5,
towel ff0066, light ffad00, truck ff0014, tower ffb8b8, chandelier 001fff, awning 00ff3d,
streetlight 0047ff, booth ff00cc, television 00ffc2, airplane 00ff52, dirt track 000aff,
apparel 0070ff, pole 3300ff, land 00c2ff, bannister 007aff, escalator 00ffa3, ottoman ff9900,
bottle 00ff0a, buffet ff7000, poster 8fff00, stage 5200ff, van a3ff00, ship ffeb00, fountain 08b8aa,
conveyer belt 8500ff, canopy 00ff5c, washer b800ff, plaything ff001f, swimming pool 00b8ff,
stool 00d6ff, barrel ff0070, basket 5cff00, waterfall 00e0ff, tent 70e0ff, bag 46b8a0,
minibike a300ff, cradle 9900ff, oven 47ff00, ball ff00a3, food ffcc00, step ff008f, tank 00ffeb,
trade name 85ff00, microwave ff00eb, pot f500ff, animal ff007a, bicycle fff500, lake 0abed4,
dishwasher d6ff00, screen 00ccff, blanket 1400ff, sculpture ffff00, hood 0099ff, sconce 0029ff,
vase 00ffcc, traffic light 2900ff, tray 29ff00, ashcan ad00ff, fan 00f5ff, pier 4700ff,
crt screen 7a00ff, plate 00ffb8, monitor 005cff, bulletin board b8ff00, shower 0085ff,
radiator ffd600, glass 19c2c2, clock 66ff00, flag 5c00ff
"""
"""The first of the names that ADE20K gives a class, and the colour that it is usually shown in."""

_ROWS = [entry.strip().rsplit(maxsplit=1) for entry in _TABLE.split(",")]

CLASSES = [name for name, _ in _ROWS]
PALETTE = [(red, green, blue) for red, green, blue in (bytes.fromhex(row[1]) for row in _ROWS)]
