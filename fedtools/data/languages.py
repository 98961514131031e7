"""Language codes: which codes are known, and which of them name the same language.

All codes of ISO 639-1 are known, those of ISO 639-2 and -3 for the same languages, and the codes in
Common Voice's list. "de", "deu", "ger" and "de-AT" name one language. A code may be followed by a
script and a region, or by the variant of a language in Common Voice.
"""

from __future__ import annotations

import re

# Codes of ISO 639-1, with those of ISO 639-3 for the same languages.
_PAIRS = """
    aa=aar ab=abk ae=ave af=afr ak=aka am=amh an=arg ar=ara as=asm av=ava ay=aym az=aze ba=bak
    be=bel bg=bul bi=bis bm=bam bn=ben bo=bod br=bre bs=bos ca=cat ce=che ch=cha co=cos cr=cre
    cs=ces cu=chu cv=chv cy=cym da=dan de=deu dv=div dz=dzo ee=ewe el=ell en=eng eo=epo es=spa
    et=est eu=eus fa=fas ff=ful fi=fin fj=fij fo=fao fr=fra fy=fry ga=gle gd=gla gl=glg gn=grn
    gu=guj gv=glv ha=hau he=heb hi=hin ho=hmo hr=hrv ht=hat hu=hun hy=hye hz=her ia=ina id=ind
    ie=ile ig=ibo ii=iii ik=ipk io=ido is=isl it=ita iu=iku ja=jpn jv=jav ka=kat kg=kon ki=kik
    kj=kua kk=kaz kl=kal km=khm kn=kan ko=kor kr=kau ks=kas ku=kur kv=kom kw=cor ky=kir la=lat
    lb=ltz lg=lug li=lim ln=lin lo=lao lt=lit lu=lub lv=lav mg=mlg mh=mah mi=mri mk=mkd ml=mal
    mn=mon mr=mar ms=msa mt=mlt my=mya na=nau nb=nob nd=nde ne=nep ng=ndo nl=nld nn=nno no=nor
    nr=nbl nv=nav ny=nya oc=oci oj=oji om=orm or=ori os=oss pa=pan pi=pli pl=pol ps=pus pt=por
    qu=que rm=roh rn=run ro=ron ru=rus rw=kin sa=san sc=srd sd=snd se=sme sg=sag sh=hbs si=sin
    sk=slk sl=slv sm=smo sn=sna so=som sq=sqi sr=srp ss=ssw st=sot su=sun sv=swe sw=swa ta=tam
    te=tel tg=tgk th=tha ti=tir tk=tuk tl=tgl tn=tsn to=ton tr=tur ts=tso tt=tat tw=twi ty=tah
    ug=uig uk=ukr ur=urd uz=uzb ve=ven vi=vie vo=vol wa=wln wo=wol xh=xho yi=yid yo=yor za=zha
    zh=zho zu=zul
"""
# Codes of ISO 639-2/B, withdrawn codes, and individual languages of ISO 639-3 for which a code of
# ISO 639-1 is mostly used; for Chinese, all languages that are written in characters.
_ALIASES = """
    alb=sq arm=hy baq=eu bur=my chi=zh cze=cs dut=nl fre=fr geo=ka ger=de gre=el ice=is mac=mk
    mao=mi may=ms per=fa rum=ro slo=sk tib=bo wel=cy iw=he ji=yi jw=jv cmn=zh arb=ar pes=fa
    ekk=et lvs=lv zsm=ms swh=sw uzn=uz azj=az ydd=yi khk=mn npi=ne ory=or plt=mg als=sq wuu=zh
    gan=zh hsn=zh cjy=zh lzh=zh
"""
# Further codes in Common Voice, and some of other corpora.
_OTHERS = """
    aat abb abq ace ach ady ajg aln ann anp arn ast awa azb azz bag bal ban bas bax bba bbj bbl
    bce bci beb bew bfd bft bgp bho bkh bkm bnm bnn bqi brh bri brx bsh bsk bsy btv bum bxk bxr
    byv cak cdo ceb cgg cjk ckb cnh cpx cpy crh csb cut cux dag dar dav din dmk dml dru dsb dua
    dyu ebr eko esu eto ewo fan fil fmp frp fub fue fuf fur gaa gag gej ggg gid gig gil giz gjk
    gju gom gor gos gsw guc gwc gwt gya hac hak haw haz hch hem hil hne hno hrx hsb hus hux hyw
    iba ibb ilo ixl izh jam jbo jgo jiv jqr kaa kab kam kbd kcn kdh kea khw kln kls kmr knn kok
    koo kpv krc ksf kvx kxp kzi led leu lij lke lld lrk lrl lss ltg lth lua luo lus lzz mag mai
    mau mbf mbo mcf mcn mcx mdd mdf meh mel mfe mgg mhk mhr mix mki mmc mni mos mqh mrh mrj mse
    msi mua mug mve mvy mxu myv nan ncx new nhe nhi nia nla nlv nmg nmz nnh nqo nso nyn nyu odk
    oru pai pap pcd pcm pez phl phr plk pne ppl prq pua pwn quc qug qup qur qus qux quy qva qvi
    qvj qvl qwa qws qxa qxp qxq qxt qxu qxw rif rof ruc rup rwm sah sat sbn scl scn sco sdh sdo
    seh sei ses shi shn skr sma smj snk snv son ssi sva syr szl szy tar tay teg tig tli tob tok
    top trs trv trw tsz ttj tui tvu tyv tzm uby udl udm ukv umb ush var vec vep vmw vot vro war
    wbl wep wes xcl xdq xhe xka xkl xmf xsm yaq yav ydg yrl yua yue zam zgh zoc zza
"""
_SCRIPTS = """
    adlm arab armn beng cans cher cyrl deva ethi geor grek gujr guru hans hant hani hebr jpan khmr
    knda kore laoo latn mlym mong mymr nkoo olck orya sinh syrc taml telu tfng thaa thai tibt
"""
_VARIANTS = "puter surmiran sursilv sutsilv vallader valencia"

_PAIRED = [pair.split("=") for pair in _PAIRS.split()]
_SAME = {three: two for two, three in _PAIRED} | dict(pair.split("=") for pair in _ALIASES.split())
_KNOWN = {two for two, _ in _PAIRED} | set(_OTHERS.split())
_PART = re.compile("[a-z]{2}|[0-9]{3}|" + "|".join([*_SCRIPTS.split(), *_VARIANTS.split()]))


def main_code(code: str) -> str:
    """Return the main code of a language, as tables use it: "zh" for zh-CN, zh_TW, zho and cmn."""
    main = re.split("[-_]", code.lower())[0]
    return _SAME.get(main, main)


def is_known(code: str) -> bool:
    """Return whether the first part of a code names a known language."""
    return main_code(code) in _KNOWN


def is_language(code: str) -> bool:
    """Return whether a text is the code of a known language, unlike cv-corpus or my-clips."""
    parts = re.split("[-_]", code.lower())[1:]
    return is_known(code) and len(parts) < 4 and all(map(_PART.fullmatch, parts))


def is_code(text: str) -> bool:
    """Return whether a text has the form of a language code, known or not."""
    return re.fullmatch("[A-Za-z]{2,3}(?:[-_][A-Za-z0-9]{2,8}){0,3}", text) is not None
