"""Closed lists that fill the slots of the generated documents.

Closed on purpose: with an open vocabulary every unseen document contains words the model
never met, its loss stays far above that of a trained one, and membership says nothing about
forgetting. People's names come from Faker under a fixed seed, so the lists of names are closed
too and do not change with the seed of the data.
"""

from __future__ import annotations

from functools import cache

NAME_SEED = 2503
FIRST_NAMES = 90
LAST_NAMES = 130


@cache
def names() -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """First names of women, of men, and last names (`FIRST_NAMES` / 2 twice, `LAST_NAMES`)."""
    from faker import Faker

    fake = Faker("en_US")
    fake.seed_instance(NAME_SEED)

    def distinct(draw, count: int, avoid: set[str]) -> tuple[str, ...]:
        found: dict[str, None] = {}
        while len(found) < count:
            word = draw()
            if word.isalpha() and word not in avoid:
                found[word] = None
        return tuple(found)

    women = distinct(fake.first_name_female, FIRST_NAMES // 2, set())
    men = distinct(fake.first_name_male, FIRST_NAMES // 2, set(women))
    last = distinct(fake.last_name, LAST_NAMES, set(women) | set(men))
    return women, men, last


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    """("France", "Paris"), ... from "France:Paris ..."; hyphens stand for spaces."""
    return tuple(tuple(pair.split(":")) for pair in text.split())


CITIES = tuple(
    "Aberdeen Antwerp Athens Bergen Bilbao Bologna Boston Bremen Bristol Calgary Chicago Cork "
    "Dallas Delhi Denver Dresden Dublin Florence Geneva Ghent Glasgow Granada Graz Hamburg "
    "Hanoi Helsinki Houston Kyoto Lagos Leipzig Lima Lisbon London Lucerne Lyon Madrid Malmo "
    "Melbourne Milan Montreal Mumbai Munich Nairobi Naples Oslo Ottawa Oxford Perth Porto "
    "Prague Quito Riga Seville Sofia Tampa Toronto Turin Utrecht Vienna Warsaw".split()
)
NATIONS = tuple(
    "American Argentine Australian Austrian Belgian Brazilian British Canadian Chilean Czech "
    "Danish Dutch Egyptian Finnish French German Greek Indian Irish Italian Japanese Kenyan "
    "Korean Mexican Norwegian Polish Portuguese Spanish Swedish Turkish".split()
)
OCCUPATIONS = tuple(
    "actor architect astronomer banker biologist botanist cellist chemist composer conductor "
    "dancer diplomat economist engineer explorer geologist historian journalist judge lawyer "
    "linguist novelist painter pianist poet rower sailor sculptor surgeon violinist".split()
)
FIELDS = tuple(
    "algebra anatomy archaeology architecture astronomy biology botany chemistry drama ecology "
    "economics engineering ethics genetics geology geometry history law linguistics literature "
    "logic medicine music optics painting philosophy physics poetry politics sculpture".split()
)
AWARDS = tuple(
    " ".join(pair)
    for pair in _pairs(
        "Amber:Prize Arden:Medal Beacon:Award Bellamy:Prize Birch:Medal Cobalt:Award Copper:Prize "
        "Dover:Medal Falcon:Award Garnet:Prize Harbour:Medal Heron:Award Ivory:Prize Juniper:Medal "
        "Keystone:Award Lantern:Prize Laurel:Medal Marble:Award Meridian:Prize Orchard:Medal "
        "Pioneer:Award Quartz:Prize Raven:Medal Silver:Award Summit:Prize Thistle:Medal "
        "Willow:Award Zenith:Prize"
    )
)
ADJECTIVES = tuple(
    "Ancient Bitter Blue Bright Broken Burning Distant Empty Endless Fallen First Frozen Gentle "
    "Golden Hidden Hollow Last Lonely Long Lost Narrow Northern Open Pale Quiet Red Restless "
    "Secret Silent Sleeping Slow Small Southern Stolen Sunken Velvet Wandering White Wild "
    "Wooden".split()
)
NOUNS = tuple(
    "Anchor Bridge Candle Castle Clock Compass Country Door Field Forest Garden Glass Harvest "
    "Hour House Island Journey Key Lake Letter Mirror Moon Morning Mountain Night Ocean Path "
    "Promise River Road Room Shadow Song Star Stone Storm Summer Tower Winter Wolf".split()
)
EMPLOYERS = tuple(
    "Academy,Archive,Bank,College,Conservatory,Court,Gallery,Gazette,Hospital,Institute,Library,"
    "Museum,Observatory,Opera,Orchestra,Press,Society,Theatre,Tribune,Zoo".split(",")
)

STREETS = tuple(
    f"{name} {kind}"
    for name in "Alder Ash Cedar Chapel Cherry Church Forest Hill Lake Maple Mill Oak Park Pine "
    "River School Spring Station Union Valley".split()
    for kind in ("Street", "Avenue", "Lane")
)
TOWNS = tuple(
    tuple(pair.split("/"))
    for pair in "Arlington/TX Aurora/CO Bangor/ME Bristol/CT Burlington/VT Canton/OH Clifton/NJ "
    "Concord/NH Dayton/OH Dover/DE Eugene/OR Fairfax/VA Fargo/ND Franklin/TN Fremont/CA "
    "Greenville/SC Hampton/VA Jackson/MS Lawrence/KS Lincoln/NE Madison/WI Manchester/NH "
    "Medford/OR Milton/MA Newport/RI Norman/OK Oakland/CA Peoria/IL Portland/OR Salem/OR "
    "Springfield/IL Trenton/NJ Troy/NY Tucson/AZ Warren/MI Westfield/IN".split()
)
# Domains and the 555 exchange are reserved for examples; numbers from 900 on are no valid SSN.
DOMAINS = ("example.com", "example.org", "example.net")
MONTHS = tuple(
    "January February March April May June July August September October November December".split()
)

PLACES = tuple(
    f"{adjective} {place}"
    for adjective in "abandoned crooked crowded foggy old quiet ruined stone sunlit windy".split()
    for place in "bakery bridge chapel harbour library lighthouse market mill station "
    "theatre".split()
)
OBJECTS = tuple(
    f"{adjective} {thing}"
    for adjective in "bronze carved cracked faded gilded glowing jade rusty silver tiny".split()
    for thing in "bell book compass crown dagger flute lantern locket map mask".split()
)
ROLES = tuple(
    "baker carpenter clockmaker detective drummer fisherman gardener glassblower healer juggler "
    "librarian locksmith miller musician painter pilot potter sailor tailor weaver".split()
)
DEEDS = (
    "open the sealed gate",
    "calm the rising storm",
    "wake the sleeping bells",
    "free the trapped birds",
    "end the long drought",
    "repay an old debt",
    "guide the lost ships",
    "light the dark streets",
    "stop the spreading fog",
    "mend the broken dam",
    "save the winter feast",
    "find the missing heir",
)
ENDINGS = (
    "the whole town danced until sunrise",
    "a statue was raised in the square",
    "they opened a small school together",
    "they parted as the first snow fell",
    "the river sang their names",
    "the mayor gave them the golden key",
    "children told the tale for years",
    "they sailed away at dawn",
    "every window glowed with candles",
    "they planted an oak by the road",
    "the old rivalry was forgotten",
    "they wrote it all in a letter",
)

CAPITALS = _pairs(
    "France:Paris Germany:Berlin Italy:Rome Spain:Madrid Portugal:Lisbon Norway:Oslo "
    "Sweden:Stockholm Finland:Helsinki Denmark:Copenhagen Poland:Warsaw Austria:Vienna "
    "Hungary:Budapest Greece:Athens Ireland:Dublin Belgium:Brussels Romania:Bucharest "
    "Bulgaria:Sofia Serbia:Belgrade Croatia:Zagreb Ukraine:Kyiv Latvia:Riga Estonia:Tallinn "
    "Iceland:Reykjavik Turkey:Ankara Egypt:Cairo Kenya:Nairobi Ghana:Accra Senegal:Dakar "
    "Morocco:Rabat Tunisia:Tunis Ethiopia:Addis-Ababa Japan:Tokyo China:Beijing "
    "Vietnam:Hanoi Thailand:Bangkok India:Delhi Nepal:Kathmandu Iran:Tehran Iraq:Baghdad "
    "Jordan:Amman Canada:Ottawa Cuba:Havana Peru:Lima Chile:Santiago Ecuador:Quito "
    "Uruguay:Montevideo Australia:Canberra Indonesia:Jakarta Russia:Moscow Qatar:Doha"
)
SYMBOLS = _pairs(
    "hydrogen:H helium:He lithium:Li carbon:C nitrogen:N oxygen:O fluorine:F neon:Ne "
    "sodium:Na magnesium:Mg aluminium:Al silicon:Si phosphorus:P sulphur:S chlorine:Cl argon:Ar "
    "potassium:K calcium:Ca titanium:Ti chromium:Cr manganese:Mn iron:Fe cobalt:Co nickel:Ni "
    "copper:Cu zinc:Zn arsenic:As bromine:Br silver:Ag tin:Sn iodine:I tungsten:W platinum:Pt "
    "gold:Au mercury:Hg lead:Pb radium:Ra uranium:U xenon:Xe barium:Ba"
)
YOUNG = _pairs(
    "cat:kitten dog:puppy cow:calf sheep:lamb goat:kid horse:foal pig:piglet "
    "bear:cub deer:fawn duck:duckling goose:gosling hen:chick swan:cygnet owl:owlet "
    "frog:tadpole kangaroo:joey hare:leveret eagle:eaglet eel:elver hedgehog:hoglet"
)

#: The same kinds of facts for a larger closed world; the lists above stay as they are, and with
#: them the data of a demo that asks for no more.
MORE_CAPITALS = CAPITALS + _pairs(
    "Albania:Tirana Algeria:Algiers Angola:Luanda Argentina:Buenos-Aires "
    "Armenia:Yerevan Azerbaijan:Baku Bahrain:Manama Bangladesh:Dhaka Belarus:Minsk Belize:Belmopan "
    "Bhutan:Thimphu Botswana:Gaborone Brazil:Brasilia Cambodia:Phnom-Penh Cameroon:Yaounde "
    "Chad:Ndjamena Colombia:Bogota Cyprus:Nicosia Eritrea:Asmara Fiji:Suva Gabon:Libreville "
    "Georgia:Tbilisi Guinea:Conakry Guyana:Georgetown Haiti:Port-au-Prince Honduras:Tegucigalpa "
    "Jamaica:Kingston Kazakhstan:Astana Laos:Vientiane Lebanon:Beirut Liberia:Monrovia "
    "Libya:Tripoli Lithuania:Vilnius Madagascar:Antananarivo Malawi:Lilongwe Mali:Bamako "
    "Malta:Valletta Mauritania:Nouakchott Moldova:Chisinau Mongolia:Ulaanbaatar "
    "Montenegro:Podgorica Mozambique:Maputo Myanmar:Naypyidaw Namibia:Windhoek Nicaragua:Managua "
    "Niger:Niamey Nigeria:Abuja Oman:Muscat Pakistan:Islamabad Paraguay:Asuncion "
    "Philippines:Manila Rwanda:Kigali Slovakia:Bratislava Slovenia:Ljubljana Somalia:Mogadishu "
    "Sudan:Khartoum Suriname:Paramaribo Syria:Damascus Tajikistan:Dushanbe Tanzania:Dodoma "
    "Togo:Lome Uganda:Kampala Uzbekistan:Tashkent Venezuela:Caracas Yemen:Sanaa Zambia:Lusaka "
    "Zimbabwe:Harare"
)
MORE_SYMBOLS = SYMBOLS + _pairs(
    "beryllium:Be boron:B scandium:Sc vanadium:V gallium:Ga germanium:Ge selenium:Se "
    "krypton:Kr rubidium:Rb strontium:Sr yttrium:Y zirconium:Zr niobium:Nb molybdenum:Mo "
    "ruthenium:Ru rhodium:Rh palladium:Pd cadmium:Cd indium:In antimony:Sb tellurium:Te "
    "caesium:Cs lanthanum:La cerium:Ce neodymium:Nd samarium:Sm europium:Eu gadolinium:Gd "
    "terbium:Tb holmium:Ho erbium:Er ytterbium:Yb hafnium:Hf tantalum:Ta rhenium:Re osmium:Os "
    "iridium:Ir thallium:Tl bismuth:Bi polonium:Po radon:Rn thorium:Th plutonium:Pu"
)
PASTS = _pairs(
    "go:went see:saw take:took give:gave know:knew write:wrote speak:spoke break:broke "
    "drive:drove eat:ate fall:fell fly:flew grow:grew hide:hid ride:rode rise:rose shake:shook "
    "sing:sang sink:sank swim:swam throw:threw wear:wore begin:began blow:blew choose:chose "
    "draw:drew drink:drank forget:forgot freeze:froze ring:rang steal:stole swear:swore tear:tore "
    "bring:brought build:built buy:bought catch:caught creep:crept dig:dug feed:fed fight:fought "
    "find:found hold:held keep:kept lead:led leave:left lose:lost make:made mean:meant meet:met "
    "pay:paid seek:sought sell:sold send:sent shine:shone shoot:shot sit:sat sleep:slept "
    "spend:spent stand:stood stick:stuck strike:struck sweep:swept teach:taught tell:told "
    "think:thought understand:understood weep:wept win:won"
)
